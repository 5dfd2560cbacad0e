// The expert cache and the passes over layers of a model whose experts are not all in memory. The
// headers build on each other in this order.
#include <errno.h>

#include "../io/reads.h"
#include "../layers.h"

#include "cache.h"
#include "loads.h"
#include "predictors.h"
#include "mixture.h"
