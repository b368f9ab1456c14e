from . import core as core
from . import cost as cost
from . import data as data
from . import hostcomm as hostcomm
from . import layers as layers
from . import metrics as metrics
from . import models as models
from . import optim as optim
from . import perf as perf
from . import runs as runs
from . import sharding as sharding
from . import train as train

__version__: str
