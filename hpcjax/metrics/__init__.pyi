from .classification import accuracy as accuracy
from .classification import cross_entropy as cross_entropy
from .classification import error as error
from .classification import perplexity as perplexity
from .classification import token_cross_entropy as token_cross_entropy
from .segmentation import dice as dice
