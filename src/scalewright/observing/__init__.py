"""The thermometer: what flows through a model, and what observers would make of it. Nothing is quantised.

    observe(model, data)      one pass; the model stays as it is
    Observations              figures of each layer, notes in words; merge, save, load

Records of several runs add up to what one run would have kept (records.py); figures are computed from them
(figures.py).
"""

from scalewright.observing.observations import Observations, merge_files
from scalewright.observing.run import observe

__all__ = ["Observations", "merge_files", "observe"]
