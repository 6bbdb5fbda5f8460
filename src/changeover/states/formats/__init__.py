"""States as other trainers keep them: written from a store, and read into one."""
