"""The engine of Nereid, its attention, poolers, and the glue that model.py files call."""
