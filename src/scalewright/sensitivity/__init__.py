"""What each layer loses under each of some schemes, measured on data. The model is only looked at.

    measure_sensitivity(model, data, schemes=...)   one pass forwards and backwards; the model stays as it is
    Sensitivity                                     losses and sizes of groups of layers that must have one scheme

What it refuses to do: choose anything. That is `budget`'s.
"""

from scalewright.sensitivity.measuring import LayerGroup, Sensitivity, measure_sensitivity

__all__ = ["LayerGroup", "Sensitivity", "measure_sensitivity"]
