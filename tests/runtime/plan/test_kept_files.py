"""Files of compiled calls: what may be run is, and all else is compiled anew."""

import json
import os
import pickle
import threading

import jax
import numpy as np
import pytest

from jaxkern.runtime.plan import kept_files
from jaxkern.runtime.plan.kept_files import forget_oldest, read
from jaxkern.runtime.plan.saved_plan import MAGIC, read_parts, write_parts
from tests.runtime.plan.kept import X, capped, start

pytestmark = pytest.mark.smoke
COMPILED, FOUND = ["compile jit(softcap)"], ["cache_hit jit(softcap)"]


@pytest.fixture
def file(kept_folder, once={}):  # noqa: B006
    """A kept call, and no executable in jax's own cache, which would have it too."""
    if not once:
        start()
        [made] = kept_folder.iterdir()
        once.update(name=made.name, data=made.read_bytes())
        for other in kept_folder.parent.glob("*-cache"):
            other.unlink()
    file = kept_folder / once["name"]
    kept_folder.mkdir(mode=0o700, exist_ok=True)
    file.write_bytes(once["data"])
    return file


class Hostile:
    """What a pickle does as it is read."""

    def __reduce__(self):
        return os.putenv, ("JAXKERN_HOSTILE", "ran")


def rewritten(file, shapes=None, **changes):
    """The file with right checksums and other contents."""
    header, parts = read_parts(file, kept_files.PARTS)
    parts["shapes"] = parts["shapes"] if shapes is None else shapes
    write_parts(file, header | changes, parts)


def change_header(file, change):
    data = file.read_bytes()
    start = len(MAGIC) + 8
    length = int.from_bytes(data[len(MAGIC) : start], "little")
    header = json.loads(data[start : start + length])
    text = json.dumps(change(header)).encode()
    length = len(text).to_bytes(8, "little")
    file.write_bytes(MAGIC + length + text + data[start + len(header) :])


DAMAGED = {
    "empty": (lambda f: f.write_bytes(b""), "is no plan of jaxkern"),
    "foreign": (lambda f: f.write_bytes(b"PK\3\4" * 99), "is no plan of jaxkern"),
    "half": (
        lambda f: f.write_bytes(f.read_bytes()[:-1000]),
        "is truncated or damaged",
    ),
    "one bit": (
        lambda f: f.write_bytes(f.read_bytes()[:-9] + b"?" + f.read_bytes()[-8:]),
        "the checksum of its machine_code",
    ),
    "header": (lambda f: change_header(f, lambda _: [1]), "is damaged: its header"),
    "of another": (lambda f: rewritten(f, call="0" * 64), "written for another call"),
    "no variables": (lambda f: rewritten(f, variables=None), "damaged: its variables"),
    "path": (
        lambda f: rewritten(f, variables={"LD_PRELOAD": "x"}),
        "damaged: its variables",
    ),
    "number": (
        lambda f: rewritten(f, variables={"MOSAIC_GPU_CUDA_ROOT": 1}),
        "damaged: its variables",
    ),
    "no pickle": (lambda f: rewritten(f, shapes=b"no pickle"), "damaged: its shapes"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_is_damaged_is_refused_in_words(file, caplog, damage):
    change, words = DAMAGED[damage]
    change(file)
    assert read(file) is None
    assert "jaxkern traces and compiles a call anew: " in caplog.text
    assert words in caplog.text


def test_what_is_damaged_is_compiled_anew(file, caplog):
    file.write_bytes(file.read_bytes()[:-1000])
    told, y = start()
    assert told == COMPILED and "truncated" in caplog.text
    caplog.clear()
    told, again = start()
    assert told == FOUND and not caplog.text
    np.testing.assert_array_equal(again, y)
    np.testing.assert_array_equal(again, capped()(X))


def test_what_is_damaged_is_written_anew_where_jax_has_it_too(file, caplog):
    """It was read from jax's cache, which cannot be written: so at every start."""
    file.unlink()
    start()
    assert [*file.parent.parent.glob("*-cache")]
    file.write_bytes(file.read_bytes()[:-1000])
    assert start()[0] == COMPILED and "truncated" in caplog.text
    caplog.clear()
    told, y = start()
    assert told == FOUND and not caplog.text
    np.testing.assert_array_equal(y, capped()(X))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files here")
def test_what_others_could_have_written_is_not_unpickled(file, caplog, monkeypatch):
    rewritten(file, shapes=pickle.dumps(Hostile()))
    file.parent.chmod(0o755)  # others can enter, so they can write the file
    file.chmod(0o666)
    with monkeypatch.context() as patched:
        patched.setattr(pickle, "loads", lambda _: pytest.fail("it was unpickled"))
        assert start()[0] == COMPILED
    assert f"others can write to {file}: it is not run." in caplog.text
    assert start()[0] == FOUND
    elsewhere = file.with_name("elsewhere")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert read(file) is None and f"{file} is a link: it is not run." in caplog.text
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert read(elsewhere) is None and "belongs to another user" in caplog.text


def test_what_is_damaged_is_not_unpickled(file, monkeypatch):
    monkeypatch.setattr(pickle, "loads", lambda _: pytest.fail("it was unpickled"))
    file.write_bytes(file.read_bytes().replace(b"ShapeDtype", b"ShapeDType"))
    assert read(file) is None


def test_machine_code_that_does_not_load_is_compiled_anew(file, caplog):
    header, parts = read_parts(file, kept_files.PARTS)
    write_parts(file, header, parts | {"machine_code": pickle.dumps("no program")})
    assert start()[0] == COMPILED
    assert f"the machine code of {file} cannot be loaded" in caplog.text


def test_who_reads_while_others_write_sees_whole_files(file):
    compiled = capped().lower(jax.ShapeDtypeStruct((8,), "float32")).compile()
    shapes = jax.ShapeDtypeStruct((8,), "float32")
    writers = [
        threading.Thread(target=kept_files.write, args=(file, shapes, compiled))
        for _ in range(8)
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert read(file) is not None
    assert [*file.parent.iterdir()] == [file], "nothing half written is left"


def test_a_full_disk_is_said(file, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_files, "write_parts", full)
    assert start(capped(4.0))[0] == COMPILED
    assert "keeps no traced call: [Errno 28] No space left" in caplog.text


def test_the_folder_has_a_bound(file, monkeypatch, request):
    folder = file.parent
    for i, name in enumerate(["a.call", ".b.call.half", "c.call", "no_call"]):
        (folder / name).write_bytes(bytes(10))
        os.utime(folder / name, (i, i))
    forget_oldest(folder, 25 + file.stat().st_size)
    assert {f.name for f in folder.iterdir()} == {
        *(".b.call.half", "c.call", "no_call", file.name)
    }
    start()  # uses it, which makes it the newest
    forget_oldest(folder, file.stat().st_size)
    assert {f.name for f in folder.iterdir()} == {"no_call", file.name}
    assert kept_files.most_bytes() == 1 << 30
    monkeypatch.setattr(kept_files, "most_bytes", lambda: 0)
    start(capped(6.0))
    assert [f.name for f in folder.iterdir()] == ["no_call"]


def test_the_bound_is_that_of_jax_where_it_has_one(compilation_cache_as_it_was):
    before = jax.config.jax_compilation_cache_max_size
    try:
        jax.config.update("jax_compilation_cache_max_size", 12345)
        assert kept_files.most_bytes() == 12345
    finally:
        jax.config.update("jax_compilation_cache_max_size", before)
