"""What a lesson uses: pictures, explorers, progress, parameters, checks, stored results, numbers for the prose."""

from neuclip_lib.course.checks import check
from neuclip_lib.course.errors import expect_error
from neuclip_lib.course.explorer import explore
from neuclip_lib.course.figures import show
from neuclip_lib.course.kinds import a_device, at_least, between
from neuclip_lib.course.params import validate
from neuclip_lib.course.progressing import progress
from neuclip_lib.course.record import record
from neuclip_lib.course.start import start_at
from neuclip_lib.course.studies import results

__all__ = [
    "a_device",
    "at_least",
    "between",
    "check",
    "expect_error",
    "explore",
    "progress",
    "record",
    "results",
    "show",
    "start_at",
    "validate",
]
