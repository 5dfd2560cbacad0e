// The kernel's own expert cache and its passes over the layers of a model whose experts are not all
// in memory, in the order in which its parts build on each other.
#include <errno.h>

#include "../io/reads.h"
#include "../layers.h"

#include "cache.h"
#include "loads.h"
#include "predictors.h"
#include "mixture.h"
