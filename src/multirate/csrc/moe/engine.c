// The kernel's own expert cache and its passes over the layers of a model whose experts are not all
// in memory, in the order in which its parts build on each other.
#include <errno.h>

#include "../io/reads.h"
#include "../layers.h"

#include "residency.h"
#include "loads.h"
#include "forecasts.h"
#include "mixture.h"
