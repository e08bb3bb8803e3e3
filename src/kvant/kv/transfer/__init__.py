"""Pages of one engine that another engine reads, over NIXL."""
