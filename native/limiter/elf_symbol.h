#pragma once

/* The address of a function that the C library defines, read from its ELF tables, without `dlsym`; NULL if absent. */
void *elf_libc_function(const char *name);
