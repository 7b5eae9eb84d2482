"""The mathematics that methods share, as pure functions of arrays and tensors."""
