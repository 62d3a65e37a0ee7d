# cmake -DSOURCE=dir -DOUT=file -P commit.cmake: writes the commit of the tree at this moment, "-dirty" if it has changes.
# Run by each build, so that a row never carries the name of another tree.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND git describe --always --dirty --abbrev=7 WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE commit
                OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
file(CONFIGURE OUTPUT ${OUT} CONTENT "#define TWOSTEP_COMMIT \"@commit@\"\n" @ONLY)
