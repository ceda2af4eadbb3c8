/* Every way that a program can ask the dynamic linker for the address of a driver function. */
#pragma once

/* The C library's own function, found in its symbol table: `dlsym` by name would find ours. */
void *libc_dlsym(void *handle, const char *name);
