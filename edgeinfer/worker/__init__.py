"""Run models in processes of their own: the only home of onnxruntime and numpy.

Two sides live here. The daemon's side (`worker`, `nursery`, `slot`, `probe`, `spec`) never imports numpy or
onnxruntime. The worker's side (`zygote`, `main`, `session`, `feed`, `decode`, `sequence`, `golden`) does.
Both share `channel`, `messages` and `lineage`. What is loaded when, and for whom, is `edgeinfer.execution`'s.
"""
