"""The `kvant` command. Modules here import torch only inside the commands that need it."""
