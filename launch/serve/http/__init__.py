"""HTTP beneath every protocol: connections, TLS, keys and ids of requests, bodies, streams of events."""
