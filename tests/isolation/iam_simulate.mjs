// Decides an array of requests, read from stdin, by @cloud-copilot/iam-simulate. A process of its own: that package is
// AGPL-3.0-or-later, a development-time tool, and no part of what this project ships or imports.
import { runSimulation } from '@cloud-copilot/iam-simulate';

let text = '';
for await (const part of process.stdin) text += part;
const answers = [];
for (const simulation of JSON.parse(text)) {
  const done = await runSimulation(simulation, {});
  if (done.resultType === 'error') answers.push({ decision: 'error', problem: JSON.stringify(done.errors), ignored: [] });
  else {
    const results = done.results ?? [done.result];
    answers.push({
      decision: done.overallResult,
      ignored: [...new Set(results.flatMap((result) => result.ignoredContextKeys ?? []))],
    });
  }
}
console.log(JSON.stringify(answers));
