// A pass of many rows, such as a prompt's, in parts that each one thread takes through all layers
// (row_parts.c).
#ifndef MULTIRATE_ROW_PARTS_H
#define MULTIRATE_ROW_PARTS_H
#include "layers.h"

// Whether the rows are so many, and so ordered, that threads take parts of them.
int rows_go_in_parts(const Workspace *work, const Rows *rows);

// The call, of any number of rows, in parts.
void run_row_parts(Workspace *work, LayerCall *call);

// Says that a part's keys and values are in the call's `layer`-th layer, and waits until those of
// all rows before it are.
void wait_for_earlier_rows(const Turn *turn, int layer);
#endif
