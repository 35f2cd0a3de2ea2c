import tempfile
from pathlib import Path

import pytest

from overlap_sweep.cache import cache_directory, cache_root, cached_bytes, code_digest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("OVERLAP_SWEEP_CACHE", str(root))
    return root


def test_makes_the_same_only_once_where_others_see_nothing_of_it(own_cache: Path) -> None:
    made = []

    def make() -> bytes:
        made.append(1)
        return b"slow\0to make"

    assert [cached_bytes("charts", "key", make) for _ in range(3)] == [b"slow\0to make"] * 3
    assert len(made) == 1
    assert cached_bytes("charts", "another key", make) == cached_bytes("pngs", "key", make) == b"slow\0to make"
    assert len(made) == 3
    assert {path.parent.name for path in own_cache.rglob("*") if path.is_file()} == {"charts", "pngs"}
    assert {path.stat().st_mode & 0o777 for path in (own_cache, own_cache / "pngs")} == {0o700}


def test_nothing_is_kept_of_what_cannot_be_made(own_cache: Path) -> None:
    def fail() -> bytes:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached_bytes("charts", "key", fail)
    assert cached_bytes("charts", "key", lambda: b"now") == b"now"
    assert len(list((own_cache / "charts").iterdir())) == 1


@pytest.mark.parametrize("spoil", ["the root is a file", "an entry is a folder"])
def test_a_cache_that_cannot_be_used_is_not_used(own_cache: Path, spoil: str) -> None:
    if spoil == "the root is a file":
        own_cache.write_text("mine")
        assert cache_directory("charts") is None
    else:
        cached_bytes("charts", "key", lambda: b"old")
        (entry,) = (own_cache / "charts").iterdir()
        entry.unlink()
        entry.mkdir()
    assert [cached_bytes("charts", "key", lambda: b"made") for _ in range(2)] == [b"made", b"made"]


def test_a_directory_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    # Root may write everywhere.
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert cached_bytes("charts", "key", lambda: b"made") == b"made"


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OVERLAP_SWEEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "overlap_sweep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory("tables") == tmp_path / "home" / ".cache" / "overlap_sweep" / "tables"
    assert (tmp_path / "home" / ".cache" / "overlap_sweep" / "tables").is_dir()


@pytest.mark.parametrize("writable", [0o777, 0o775, 0o703])
@pytest.mark.parametrize("level", ["root", "kind"])
def test_what_others_may_write_is_not_believed(own_cache: Path, writable: int, level: str) -> None:
    assert cached_bytes("scripts", "key", lambda: b"ours") == b"ours"
    (own_cache if level == "root" else own_cache / "scripts").chmod(writable)
    assert cache_directory("scripts") is None
    assert cached_bytes("scripts", "key", lambda: b"made again") == b"made again"


def test_what_belongs_to_others_is_not_believed(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached_bytes("scripts", "key", lambda: b"theirs")
    monkeypatch.setattr("os.getuid", lambda: own_cache.stat().st_uid + 1)
    assert cached_bytes("scripts", "key", lambda: b"ours") == b"ours"


def test_the_digest_of_the_code_has_all_modules_of_a_package() -> None:
    diagnosis, trace = map(code_digest, ("overlap_sweep.diagnosis", "overlap_sweep.trace"))
    assert len(diagnosis) == len(trace) == 64
    assert diagnosis != trace
