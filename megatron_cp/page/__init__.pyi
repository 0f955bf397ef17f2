from .colours import DISTINCT as DISTINCT
from .colours import rank_colours as rank_colours
from .markdown import blocks_of as blocks_of
from .page import check_page as check_page
from .page import page_of as page_of
from .page import save_page as save_page
