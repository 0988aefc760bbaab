"""The exercises, one file each: ``NAME.py`` defines ``EXERCISE``, which a lesson reaches as ``check.NAME``."""
