"""SIGINT and SIGTERM during training: finish the step, save, then leave with the usual exit code."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType


class StopRequest:
    """Inside the block a first signal only sets ``signal``; a second one acts as it would without us.

    Outside the main thread, where Python allows no handlers, signals are left alone.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def also_here(self) -> None:
        """Another process of the run was asked to stop: leave as if the signal had come here."""
        self.signal = self.signal or signal.SIGTERM

    def leave(self) -> None:
        """Raise what the signal asked for: KeyboardInterrupt for SIGINT (exit code 130), else SystemExit(143)."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(128 + self.signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()
        print(
            f"{self.signal.name}: finishing this step, then saving (again: stop at once)", file=sys.stderr, flush=True
        )

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
