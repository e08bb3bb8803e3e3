"""`kvant eval`: what each format of the KV cache costs in quality, against the widest one."""
