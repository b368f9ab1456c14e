from .acceptance import accept as accept
from .acceptance import accept_greedy as accept_greedy
from .acceptance import accept_matching as accept_matching
from .acceptance import acceptance_rate as acceptance_rate
from .config import Sampler as Sampler
from .sampling import next_token as next_token
from .sampling import probabilities as probabilities
