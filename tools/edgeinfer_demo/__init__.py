"""The demo: the whole main job on one machine, with the real products and real input.

A real broker, the nearby service and the device daemon run the real models on real frames and audio. The demo itself
sets three things only: load, ambient temperature and the broker's state. What follows is the product's doing.
"""
