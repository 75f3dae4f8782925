"""Sleep mode for a cache that vLLM's allocator does not know.

``Worker.sleep`` unregisters the connector, suspends the backend and then measures what
was freed; ``Worker.wake_up`` resumes the backend and then lets the connector register
again. Both therefore see the cache go and come back at the right moment if the backend
itself does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kvpad.kv_cache import ExtensibleKVCache

_TAG = "kv_cache"


class CacheAwareSleepModeBackend:
    """A vLLM ``SleepModeBackend`` that also puts the supplied cache to sleep.

    Args:
        backend: vLLM's.
        cache: The supplied cache.
        on_change: Called whenever the cache has gone or come back.
    """

    def __init__(
        self,
        backend: Any,
        cache: ExtensibleKVCache,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._on_change = on_change

    def suspend(self, level: int = 1) -> None:
        """Free what ``level`` frees, and every physical byte of the cache."""
        self._backend.suspend(level)
        self._cache.release_physical()
        self._on_change()

    def resume(self, tags: list[str] | None = None) -> None:
        """Restore what ``tags`` name (None: all); the cache comes back zeroed."""
        self._backend.resume(tags)
        # Waking the rest after the cache was woken by its tag finds it awake.
        if (tags is None or _TAG in tags) and self._cache.is_released:
            self._cache.recommit()
            self._on_change()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Drop what ``tags`` name without keeping its contents."""
        self._backend.discard(tags)
        if _TAG in tags:
            self._cache.release_physical()
            self._on_change()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)
