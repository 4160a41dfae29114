"""The door for local apps: Open Inference Protocol v2 over HTTP/1.1 on a UNIX socket."""
