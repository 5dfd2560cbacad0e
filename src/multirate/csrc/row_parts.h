// A pass of many rows, such as a prompt, in slices that one thread each takes through all layers
// (row_parts.c).
#ifndef MULTIRATE_ROW_PARTS_H
#define MULTIRATE_ROW_PARTS_H
#include "layers.h"

// Whether there are enough rows, in the right order, for threads to take slices of them.
int rows_go_in_parts(const Workspace *work, const Rows *rows);

// Runs the call, with any number of rows, in slices.
void run_row_parts(Workspace *work, LayerCall *call);

// Signals that a slice's keys and values are in the call's `layer`-th layer, and waits until those
// of all earlier rows are.
void wait_for_earlier_rows(const Turn *turn, int layer);
#endif
