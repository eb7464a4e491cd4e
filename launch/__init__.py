"""The programs of the wheel, with the recipes of models/; nothing imports them.

`python -m launch.local` is `tfdistill run`, and each other module is the
command of its name.
"""

import models
from tfdistill.recipes import recipes as recipes

recipes.register(models.RECIPES, train="launch.train")
