// A pool of helper threads that wait for one job at a time.
#pragma once

namespace pagedkv {

// Called once in every thread that takes part; it claims work by itself until there is none left.
typedef void (*Job)(void* context);

// Runs job on the calling thread and on up to threads - 1 helpers, and returns when all that began have ended.
//
//   caller   | publish | job(context) ........ | close | wait for helpers inside |
//   helper        | wake | job(context) ..... |
//   helper                          | wake late: the job is closed, sleep again |
//
// A helper that wakes late costs nothing, since nobody waits for it. If the pool serves another caller just
// then, the job runs on the calling thread alone: safe from any number of threads, and no deadlock. After
// fork() the child starts with an empty pool. Exceptions must not leave a job.
void run_on_threads(Job job, void* context, int threads);

}  // namespace pagedkv
