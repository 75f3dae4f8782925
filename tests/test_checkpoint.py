"""The demo's checkpoint is made once, and never seen half made."""

from __future__ import annotations

from pathlib import Path

import pytest

import checkpoint


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; the model package is taken as installed."""
    monkeypatch.setenv("KVPAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint, "_find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(checkpoint.importlib.metadata, "version", lambda name: "1")
    return tmp_path / "cache"


def test_it_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def convert(gguf: Path, folder: Path, kv_heads: int) -> None:
        made.append(kv_heads)
        (folder / "model").write_text("complete")

    monkeypatch.setattr(checkpoint, "_convert", convert)
    first = checkpoint.ensure_checkpoint()
    assert checkpoint.ensure_checkpoint() == first
    assert checkpoint.ensure_checkpoint(kv_heads=4) != first
    assert made == [3, 4]
    assert first.parent == cache
    assert (first / "model").read_text() == "complete"


def test_an_interrupted_conversion_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path, kv_heads: int) -> None:
        (folder / "model").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.ensure_checkpoint()
    assert list(cache.iterdir()) == []


def test_the_first_of_two_makers_wins(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path, kv_heads: int) -> None:
        # Meanwhile, in another process:
        other = cache / "model-1-bf16-kv3"
        other.mkdir()
        (other / "model").write_text("theirs")
        (folder / "model").write_text("ours")

    monkeypatch.setattr(checkpoint, "_convert", convert)
    target = checkpoint.ensure_checkpoint()
    assert (target / "model").read_text() == "theirs"
    assert list(cache.iterdir()) == [target]


def test_fewer_heads_than_the_model_has_are_refused() -> None:
    with pytest.raises(ValueError, match="3 or more, got 2"):
        checkpoint.ensure_checkpoint(kv_heads=2)
