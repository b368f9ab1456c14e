"""A network of the circle, timed beside the members that it spares; a minute.

It also times a member and a network of the globe, for which it needs the extra
`weather`, but no data.
Expect: a prediction in a few percent of a member's time on the globe (`hpcjax table
weather_uncertainty/cost`).
"""

import dataclasses

from configs.weather_uncertainty import circle as trained
from experiments.weather_uncertainty.cost import Config

circle = Config(
    dataset=trained.field_cnn.dataset,
    model=trained.field_cnn.model,
    optimizer=trained.field_cnn.optimizer,
    train=trained.field_cnn.train,
)
# A control: the spread of other dates.
shuffled = dataclasses.replace(circle, dataset=trained.shuffled.dataset, globe=False)
base = circle
