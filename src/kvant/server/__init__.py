"""`kvant serve`: an API process without torch, and an engine process that it watches over."""
