"""How a site trains: the settings, the one loop, its steps, several processes, and batches larger than memory."""
