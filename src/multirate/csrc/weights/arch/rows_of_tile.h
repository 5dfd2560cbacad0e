// N_r(F) writes F(0) … F(r − 1): a tile's rows have names instead of an array, which compilers
// spill.
#ifndef MULTIRATE_ROWS_OF_TILE_H
#define MULTIRATE_ROWS_OF_TILE_H
#define N_1(F) F(0)
#define N_2(F) N_1(F) F(1)
#define N_3(F) N_2(F) F(2)
#define N_4(F) N_3(F) F(3)
#define N_5(F) N_4(F) F(4)
#define N_6(F) N_5(F) F(5)
#define N_7(F) N_6(F) F(6)
#define N_8(F) N_7(F) F(7)
#define N_9(F) N_8(F) F(8)
#define N_10(F) N_9(F) F(9)
#define N_11(F) N_10(F) F(10)
#define N_12(F) N_11(F) F(11)
#endif
