"""The `kvant` command. Modules here stay light: torch is imported inside the commands that need it."""
