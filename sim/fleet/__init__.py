"""Several replicas behind a router."""
