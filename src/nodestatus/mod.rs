//! Layer 4: this node in the API server: registration, status, lease.
