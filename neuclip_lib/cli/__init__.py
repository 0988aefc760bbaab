"""The commands of ``python -m neuclip_lib``: one module each, with ``main(arguments) -> exit code``."""
