"""How a run goes: the round loop, the sites and their memory, and how messages reach them."""
