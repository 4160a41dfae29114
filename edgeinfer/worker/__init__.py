"""Run models in processes of their own: the only home of onnxruntime and numpy.

Two sides live here. The daemon's (`nursery`, `worker`, `flight`, `spec`, `probe`) never imports numpy or onnxruntime.
The worker's (`zygote`, `main`, `inbox`, `session`, `feed`, `decode`, `sequence`) may. Both share `channel`, `pair`,
`messages`, `slot`, `memory`, `lineage` and `fault`. What is loaded when, and for whom, is `edgeinfer.execution`'s.
"""
