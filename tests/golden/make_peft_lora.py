"""What `peft` computes with the adapters that `tests/models/test_adapter.py` writes.

    python -m tests.models.test_adapter            # with jaxkern: writes the folders
    pip install torch transformers peft && python -m tests.golden.make_peft_lora

adds to each folder under `tests/golden/peft_lora/` a `golden.npz`, all in float32:

    tokens      [t] int32
    logits      [t, vocabulary], with the adapter
    a.<name>    gradient of the mean cross entropy of tokens 1 ... t by lora_A
    b.<name>    by lora_B; names as those of the products in the saved folder
"""

from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).parent
PREFIX = "base_model.model."


def main():
    for folder in sorted((GOLDEN / "peft_lora").iterdir()):
        (base,) = GOLDEN.glob(f"transformers_*/{folder.name}")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, folder, is_trainable=True)
        tokens = np.load(base / "golden.npz")["tokens"]
        ids = torch.tensor(tokens, dtype=torch.long)[None]
        logits = model.eval()(ids).logits[0]
        torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
        found = {"tokens": tokens, "logits": logits.detach().numpy()}
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                product, _, factor = name.removeprefix(PREFIX).partition(".lora_")
                found[f"{factor[0].lower()}.{product}"] = parameter.grad.numpy()
        np.savez_compressed(folder / "golden.npz", **found)
        print(folder.name, len(found), np.abs(found["logits"]).max())


if __name__ == "__main__":
    main()
