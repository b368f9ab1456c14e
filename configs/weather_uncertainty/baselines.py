"""The spread of twenty members from five, without a network; 5 s.

Expect: an RMSE of 0.08, of the raw spread a little more (`hpcjax table
weather_uncertainty/circle`).
"""

from experiments.weather_uncertainty.baselines import Config
from hpcjax.data import Ens10Config, Lorenz96Config

CIRCLE = Lorenz96Config(
    train=300,
    validation=100,
    members=5,
    simulated=20,
    lead_days=2,
    contrast=2.0,
    share=0.005,
    holdout="test",
    learn="spread",
)
LIGHT = Ens10Config(
    members=5, lead_hours=48, holdout="test", weights="cos", learn="spread"
)

circle = Config(dataset=CIRCLE)
light = Config(dataset=LIGHT)
base = circle
