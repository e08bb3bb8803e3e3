"""`kvant serve`: an API process without torch, which starts and supervises an engine process."""
