"""PTX and SASS of Mosaic kernels: what can be known without a GPU."""

import os
from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir

from jaxkern import backend, explain, rms_norm
from jaxkern.gpu.device import compiling_for, device_capability
from jaxkern.pallas.mosaic_assembly import (
    Assembly,
    environment,
    forget_hash,
    mosaic_calls,
    read_assemblies,
)
from jaxkern.pallas.mosaic_launch import MosaicKernels, MosaicLaunch


def gradient(x):
    return jax.grad(lambda x, w: rms_norm(x, w).astype(jnp.float32).sum(), (0, 1))(
        x, jnp.ones(x.shape[-1], x.dtype)
    )


X = jax.ShapeDtypeStruct((4096, 128), jnp.bfloat16)


@pytest.mark.skipif(device_capability() is not None, reason="there is a GPU")
def test_without_a_gpu_it_is_said_where_assembly_is_made():
    with compiling_for(90), backend("mosaic_gpu"):
        rows = explain(gradient, X, platform="cuda").rows
    launches = [launch for row in rows for launch in row.launches]
    assert len(launches) == 2
    for launch in launches:
        assert "gpu.launch" in launch.mlir
        for form in ("ptx", "sass"):
            with pytest.raises(RuntimeError, match="made by jax's CUDA plugin"):
                getattr(launch, form)


def test_a_kernel_gets_a_new_hash_and_nothing_else():
    with compiling_for(90), backend("mosaic_gpu"):
        lowered = jax.jit(gradient).trace(X).lower(lowering_platforms=("cuda",))
    call = mosaic_calls(lowered.compiler_ir())[0]
    before = dict_of(call)
    forget_hash(call)
    after = dict_of(call)
    assert len(before["kernel_hash"]) == len(after["kernel_hash"]) == 32
    assert before.pop("kernel_hash") != after.pop("kernel_hash")
    assert before == after
    assert call.verify()


def dict_of(call):
    config = ir.DictAttr(call.attributes["mhlo.backend_config"])
    return {
        x.name: x.attr.value_bytes if isinstance(x.attr, ir.StringAttr) else str(x.attr)
        for x in config
    }


def test_files_of_a_compilation(tmp_path):
    for name in ("norm_32rows_0.ptx", "norm_32rows_0.sass_ctrl", "norm_1.ptx"):
        (tmp_path / name).write_text(name)
    (tmp_path / "norm_1.mlir-passes.log").write_text("")
    assert read_assemblies(tmp_path) == {
        "norm_32rows": Assembly("norm_32rows_0.ptx", "norm_32rows_0.sass_ctrl"),
        "norm": Assembly("norm_1.ptx", None),
    }


def test_what_a_compilation_did_not_write_is_said():
    made = SimpleNamespace(assemblies={"norm": Assembly("ptx of it", None)})
    norm, other = (
        MosaicLaunch(name, (1,), (), 1, (), cast(MosaicKernels, made))
        for name in ("norm", "other")
    )
    assert norm.ptx == "ptx of it"
    with pytest.raises(RuntimeError, match="norm: SASS needs nvdisasm"):
        _ = norm.sass
    with pytest.raises(RuntimeError, match="wrote no PTX of it, only of norm"):
        _ = other.ptx


def test_the_environment_is_as_before(monkeypatch):
    monkeypatch.setenv("JAXKERN_SET", "1")
    with environment(JAXKERN_SET="2", JAXKERN_UNSET="3"):
        assert os.environ["JAXKERN_SET"] == "2"
        assert os.environ["JAXKERN_UNSET"] == "3"
    assert os.environ["JAXKERN_SET"] == "1"
    assert "JAXKERN_UNSET" not in os.environ
