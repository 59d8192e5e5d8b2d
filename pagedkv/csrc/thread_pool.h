// The threads of one job: those that torch computes with, or a pool of our own.
#pragma once
#include <cstdint>

namespace pagedkv {

// Called once in every thread that takes part; it claims work by itself until there is none left.
typedef void (*Job)(void* context);

// Runs job on the calling thread and on up to threads - 1 helpers, and returns when all that began have ended.
// items: how many there are to claim; threads beyond that are not woken.
//
// With use_team the helpers are those of torch's OpenMP. They spin for milliseconds after every operation of
// torch, and a second pool beside them gets no core: int8, 8 x 1,024 tokens after a matrix product, 1.3 to 2.3
// times as long. But a team waits for all of its threads, so where others compute on the machine, too, and it
// kept its caller waiting, jobs run on our own pool for a second, as they do without a team:
//
//   caller   | publish | job(context) ........ | close | wait for helpers inside |
//   helper        | wake | job(context) ..... |
//   helper                          | wake late: the job is closed, sleep again |
//
// A helper that wakes late costs nothing, since nobody waits for it.
//
// If the threads serve another caller just then, the job runs on the calling thread alone: safe from any number
// of threads, and no deadlock. After fork() the child starts with an empty pool, because OpenMP hangs there.
// Exceptions must not leave a job.
void run_on_threads(Job job, void* context, int threads, int64_t items);

// GOMP_parallel of an OpenMP runtime: runs a function once in each of so many threads.
typedef void (*Team)(Job job, void* context, unsigned threads, unsigned flags);

// The team for all jobs from now on; null: our own pool. Waits for a job that runs.
void use_team(Team team);

}  // namespace pagedkv
