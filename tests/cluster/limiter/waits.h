/* What a thread waits for the scheduler: with hundreds of threads on a few cores that is most of what a call takes, and
 * none of it is the limiter's doing. */
#pragma once

#include <stdint.h>

uint64_t now_ns(void);

/* How long the calling thread has been ready to run and waited for a core. 0 where the kernel does not count it. */
uint64_t waited_for_core_ns(void);

/* How long it has waited for a lock of the limiter whose owner was ready to run and waited for a core. */
uint64_t waited_for_owners_ns(void);
