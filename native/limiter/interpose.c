#include "interpose.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "elf_symbol.h"
#include "limits.h"
#include "nvml_hooks.h"

#pragma GCC visibility push(default)
void *dlsym(void *handle, const char *name);
void *dlvsym(void *handle, const char *name, const char *version);
void *dlopen(const char *path, int flags);
#pragma GCC visibility pop

/* Read by the assembly below; the names are hidden, and the library's only. */
void *limiter_libc_dlsym, *limiter_libc_dlvsym, *limiter_libc_dlopen;

static void find_libc_functions(void) {
    if (__atomic_load_n(&limiter_libc_dlopen, __ATOMIC_ACQUIRE)) return;
    limiter_libc_dlsym = elf_libc_function("dlsym");
    limiter_libc_dlvsym = elf_libc_function("dlvsym");
    void *libc_dlopen = elf_libc_function("dlopen");
    if (!limiter_libc_dlsym || !libc_dlopen) abort(); /* not a C library that this is for */
    __atomic_store_n(&limiter_libc_dlopen, libc_dlopen, __ATOMIC_RELEASE);
}

void *libc_dlsym(void *handle, const char *name) {
    find_libc_functions();
    return ((void *(*)(void *, const char *))limiter_libc_dlsym)(handle, name);
}

static void *hook_named(const char *name) {
    if (strncmp(name, "cu", 2) == 0) {
        const Entry *entry = entry_named(name);
        return entry ? entry->hook : NULL;
    }
    if (strncmp(name, "nvml", 4) == 0) return nvml_hook(name);
    if (strcmp(name, "dlsym") == 0) return (void *)dlsym;
    if (strcmp(name, "dlvsym") == 0) return (void *)dlvsym;
    return strcmp(name, "dlopen") == 0 ? (void *)dlopen : NULL;
}

/* What `dlsym(handle, name)` gives: a hook, or NULL for whatever the C library would give. A name that is not there
 * stays absent: programs ask for names to learn what the driver can do. */
void *limiter_choose_symbol(void *handle, const char *name) {
    find_libc_functions();
    void *hook = name && limits_are_configured() ? hook_named(name) : NULL;
    return hook && libc_dlsym(handle, name) ? hook : NULL;
}

/* RTLD_DEEPBIND makes a library find libcuda's functions before ours; a plain load finds the same names, in another
 * order. Only where a limit is set. */
int limiter_choose_flags(int flags) {
    find_libc_functions();
    return limits_are_configured() ? flags & ~RTLD_DEEPBIND : flags;
}

/* The C library looks at its caller's address (RTLD_NEXT, RUNPATH, namespaces), so it must be entered by a jump that
 * leaves that address in place, which C cannot promise. */
#if defined(__x86_64__)
#define LOOKUP(function)                                                                     \
    __asm__(".text\n.globl " #function "\n.type " #function ", @function\n" #function ":\n"  \
            "endbr64\n push %rdi\n push %rsi\n push %rdx\n"                                  \
            "call limiter_choose_symbol\n"                                                   \
            "pop %rdx\n pop %rsi\n pop %rdi\n"                                               \
            "test %rax, %rax\n jnz 1f\n jmp *limiter_libc_" #function "(%rip)\n1: ret\n"     \
            ".size " #function ", . - " #function "\n")
__asm__(".text\n.globl dlopen\n.type dlopen, @function\ndlopen:\n"
        "endbr64\n push %rdi\n mov %esi, %edi\n"
        "call limiter_choose_flags\n"
        "mov %eax, %esi\n pop %rdi\n jmp *limiter_libc_dlopen(%rip)\n"
        ".size dlopen, . - dlopen\n");
#elif defined(__aarch64__)
#define LOOKUP(function)                                                                     \
    __asm__(".text\n.globl " #function "\n.type " #function ", %function\n" #function ":\n"  \
            "stp x29, x30, [sp, -48]!\n mov x29, sp\n stp x0, x1, [sp, 16]\n str x2, [sp, 32]\n" \
            "bl limiter_choose_symbol\n mov x16, x0\n"                                       \
            "ldp x0, x1, [sp, 16]\n ldr x2, [sp, 32]\n ldp x29, x30, [sp], 48\n"             \
            "cbnz x16, 1f\n adrp x16, limiter_libc_" #function "\n"                          \
            "ldr x16, [x16, :lo12:limiter_libc_" #function "]\n br x16\n"                    \
            "1: mov x0, x16\n ret\n.size " #function ", . - " #function "\n")
__asm__(".text\n.globl dlopen\n.type dlopen, %function\ndlopen:\n"
        "stp x29, x30, [sp, -32]!\n mov x29, sp\n str x0, [sp, 16]\n mov w0, w1\n"
        "bl limiter_choose_flags\n mov w1, w0\n"
        "ldr x0, [sp, 16]\n ldp x29, x30, [sp], 32\n"
        "adrp x16, limiter_libc_dlopen\n ldr x16, [x16, :lo12:limiter_libc_dlopen]\n br x16\n"
        ".size dlopen, . - dlopen\n");
#else
#error "the limiter is written for x86-64 and aarch64"
#endif
LOOKUP(dlsym);
LOOKUP(dlvsym);
