"""Local inference loops: a source of frames, a model, sinks for the results."""
