"""An explicit-state model of the protocol: small enough to read, and searched completely."""
