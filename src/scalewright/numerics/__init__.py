"""Pure functions on tensors: no modules, no files, no logging, nothing that is remembered."""
