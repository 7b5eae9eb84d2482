"""The contract: messages, methods, clients, the server's state, aggregation, privacy and checkpoints."""
