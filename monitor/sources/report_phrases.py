"""Phrases of people about an engine, by the concept that each names, English and Chinese.

A phrase is one observation, not a cause. Which causes a set of them suggests is for
kvscope.monitor.detectors.hypotheses to weigh. A phrase that the sentence denies ("no preemptions") is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final, NamedTuple

from kvscope.monitor.sources.pasted_lines import PastedLine

MOST_PROSE: Final = 100_000
"""Characters: no real report is longer."""
MOST_QUOTED_WORDS: Final = 90

_NEAR: Final = r"[^.。\n]{0,60}?"
_SYSTEM: Final = r"(?:KV|block|cache|memory|pool)"
_RAM: Final = r"(?:(?:\bCPU|\bhost|\bsystem|\bserver)[ -](?:RAM|memory)|\bRAM\b|\bRSS\b|(?<!显)内存)"
_GROWS: Final = r"(?:gr[eo]w|increas|leak|overflow|climb|exhaust|OOM|killed|不会?释放|不足|泄[漏露]|打爆)"
_TIER: Final = r"(?:(?:storage|remote|file|disk|SSD|CPU)[- ](?:storage |tier |cache )?(?:backend|tier|cache|storage))"
_GET: Final = r"(?:pull|fetch|transfer|receiv|read|load)"

PHRASES: Final[dict[str, str]] = {
    "stuck": r"\bhang(?:s|ing)?\b|\bhung\b|\bstuck|dead-?\s?lock|live-?lock|\bfro(?:ze|zen)\b|\bstall(?:s"
    r"|ed)?\b|unresponsive"
    r"|not? respon|never (?:finish|complet|return|respon|start)|stops? (?:all )?(?:processing|generating"
    r"|serving|working|returning|responding|answering)|\bjust stops\b|zombie|encounter\w* (?:a )?(?:dead-?)?lock\b"
    r"|generates nothing|nothing (?:behind it )?is served|infinite(?:ly)? (?:loop|rollback|wait)|wait(?:s|ed"
    r"|ing)? (?:for ever|forever)"
    r"|卡住|卡死|挂起|死锁|停住|无响应|不再恢复",
    "waits_unserved": rf"Running\W{{0,3}}0\b{_NEAR}Waiting|nothing (?:is )?running|(?:no|any) (?:new |other "
    rf"|more )?requests?"
    rf" (?:is|are|can be|gets?) {_NEAR}(?:admitted|accepted|scheduled)|never (?:be )?(?:scheduled|admitted)"
    rf"|stuck in (?:the )?\W?(?:waiting|pending)"
    r"|waiting queue (?:does not|doesn't|never|stops)|stops? admitting|queue (?:does not|doesn't) move"
    r"|takes no other request"
    r"|requests? (?:stay|remain|pile|stack|queue)\w* (?:up )?in (?:the )?(?:waiting|queue)"
    r"|waiting but not|not (?:being )?(?:admitted|scheduled)\b|prevented from scheduling",
    "aborted": r"\babort\w*|\bcancel\w*|disconnect\w*|client time-?\s?outs?|gateway time-?\s?out"
    r"|FINISHED_ABORTED|取消|中止|断开",
    "remote_load": rf"WAITING_FOR_REMOTE_KVS?|remote[- ]KV|KV(?:[- ]cache)? transfers?|\bload(?:s|ed|ing)?\b{_NEAR}"
    rf"(?:KV|CPU|pool|host|disk|remote|in flight|blocks?)|KV{_NEAR}\b(?:fetch|pull|load)(?:ed|ing|es)?\b"
    rf"|load_async|finished_recving|\b{_GET}\w* (?:the )?(?:remote )?KV\b"
    r"|on-?board(?:ing|ed)|decode (?:requests?|side|node|instance)s?" + _NEAR + r"\bwait|KVPoll|WaitingForInput",
    "transfer_lost": rf"(?:transfer|load|fetch|prefill (?:node|instance)|\bP\b|peer|notification|completion){_NEAR}"
    r"(?:fail|crash|lost|drop|never (?:arriv|report|notif|complet|com)|times? out|interrupt)|forget\w* (?:the )?request"
    r"|never (?:reports?|set|notif)|not told"
    rf"|(?:fail\w*|unable|cannot|can't|could(?: not|n't)) (?:to )?{_GET}\w*{_NEAR}(?:KV|cache|blocks?)"
    rf"|handshake\w*{_NEAR}fail|fail\w*{_NEAR}handshake",
    "not_freed": rf"(?:never|not|cannot|can't|won't|aren't|isn't)(?: be| been| get)? (?:freed|released"
    rf"|reclaimed|unpinned|recycled|returned to (?:the )?(?:\w+ )?pool)"
    rf"|\bleak(?:s|ed|ing|age)?\b|\bheld\b(?! (?:up|back))|\bhold(?:s|ing)?\b{_NEAR}(?:blocks?|slots?|KV|cache)"
    r"|lost for good|pile up|\b(?:do|does|did)(?: not|n't) (?:\w+ ){0,2}?(?:free|release|return|reclaim)\b"
    rf"|{_SYSTEM}\w*{_NEAR}(?:does(?:n't| not)|never|not) (?:go down|decrease|drop|shrink|fall|recover|return)"
    rf"|{_SYSTEM}\w*{_NEAR}(?:keeps?|kept) (?:on )?(?:grow|increas|ris|climb)"
    r"|不释放|未释放|没有释放|无法释放|泄[漏露]|不下降|没有自己降|持续升高"
    r"|(?:still|remains?|remained|could remain) (?:occup|allocated|in use|held)|\bstranded\b|unable to free",
    "finished_request": r"\bfinished\b|FINISHED_\w+|complet(?:ed|ion of) requests?"
    r"|after (?:all )?(?:the )?requests? (?:complete|finish|end)|after (?:\w+ )?(?:complet|finish)ing\b"
    r"|delay(?:s|ed|ing)? (?:the )?free|request_finished|delay_free",
    "lease": r"\bleases?\b|ABORT_REQUEST_TIMEOUT|DISAGGREGATION_\w{0,40}TIMEOUT|\bexpir(?:e|es|ed|y|ation)\b"
    r"|kv_lease|pinned until"
    rf"|(?:cannot|not) be freed {_NEAR}(?:\d+|five|ten) (?:s\b|sec|min)|(?:whole|full) \d+ ?s\b",
    "connector": r"\bnixl\w*|mooncake\w*|lmcache\w*|\w{1,40}Connector(?:V\d)?\b|\bKVBM\b|kv[_-]transfer"
    r"|KV[- ](?:cache )?offload\w*"
    r"|SimpleCPUOffload\w*|HiCache|AscendStore\w*|FlexKV|kv_connector|KV-cache connector|offloading connector",
    "disaggregated": r"\bP/?D\b|PD[- _]?disagg\w*|disaggregat\w*|prefill(?:er)?s? (?:node|instance|worker|side"
    r"|server)s?"
    r"|decode (?:node|instance|worker|side|engine)s?|PD ?分离|\bprefillers?\b|\d+p\d+d\b",
    "offload": r"offload\w*|CPU (?:tier|cache|backend|memory pool)|host (?:tier|memory|cache)|local[ _]cpu"
    r"|Redis|disk tier|secondary tier",
    "encoder_cache": r"encoder(?:'s)?[ _-]?cache\w*|encoder[ _](?:compute )?budget|num_freeable_slots"
    r"|encoder_cache_size|mm_embed\w*",
    "multimodal": r"(?<!docker )(?<!container )\bimages?\b(?! ?:)"
    r"|\bvideos?\b|multi-?modal|\bvision\b|\bVLM?\b|\bMM data\b",
    "zero_tokens": r"num_new_tokens ?(?:==?|is|to) ?0|\b(?:0|zero|no) (?:new )?tokens? (?:at|in|each|every"
    r"|again)|scheduled with 0"
    r"|gets? 0 tokens|(?:which|rounds?|rounded)[^.]{0,40} (?:is|to) 0\b",
    "too_large": rf"\b(?:larger|longer|bigger|more|greater) {_NEAR}than {_NEAR}(?:cache|pool|capacity|blocks"
    rf"|budget|there)"
    rf"|exceed\w* {_NEAR}(?:cache|pool|capacity|block)|requir\w+ \d+ blocks|needs? (?:more|\d+) blocks"
    rf"|超过{_NEAR}(?:容量|缓存)",
    "pool_overridden": r"num[_-]gpu[_-]blocks[_-]override",
    "grammar": r"\bgrammars?\b|guided[_ ]?(?:decoding|json|regex|choice)|structured[_ ]outputs?|xgrammar"
    r"|llguidance|\bjson[_ ]schemas?\b"
    r"|WAITING_FOR_(?:FSM|STRUCTURED)\w*|response_format",
    "prefix_misses": r"(?:prefix|cache)[- _]?(?:cach\w*|hits?)"
    + _NEAR
    + r"(?:\b0 ?%|\bzero\b|\b0/\d|no hits?|never hits?|miss(?:es|ed)\b|"
    r"ineffective|(?:not|n't) (?:work|hit)|drops? to|useless|no-op|disappear)|\b(?:0 ?%|zero"
    r"|no)[- ](?:prefix[- ])?(?:cache[- ])?hits?"
    rf"|hit rate{_NEAR} (?:is|was|stays|remains) (?:(?:very|too|so|extremely) )?(?:low|poor)\b"
    r"|hit rate\W{1,3}(?:of )?(?:0\b|0\.0|near(?:ly)? 0|drop)|命中率?[^。\n]{0,10}(?:0|低|下降)|缓存失效",
    "shared_prompts": r"same (?:token ids|prompt|prefix|request|system prompt)|identical (?:prompt|request"
    r"|prefix)|shared (?:system )?prefix"
    r"|repeated (?:prompt|request)|multi-?turn|多轮",
    "hybrid": r"\bmamba\w*|\bhybrids?\b|\bGDN\b|gated delta|linear attention|sliding[- _]window|\bSWA\b"
    r"|align-?mode|Jamba|recurrent",
    "preempted": r"\bpreempt\w*|抢占|\bretract\w*|recompute[sd]?\b|swap(?:ped|ping)\b",
    "repeats": r"again and again|over and over|repeatedly|thrash\w*|ping-?pong|\bcascad\w*"
    r"|反复|不断|livelock|rolled back",
    "after_retraction": r"(?:after|once)"
    + _NEAR
    + r"(?:retract|preempt)\w*[^。\n]{0,120}?(?:slow|falls?|fell|drop|degrad|collaps|never recover"
    r"|not recover|stays?)|(?:collapse|degradation|slow)\w* after [^.\n]{0,40}(?:retract|preempt)",
    "pinned": r"\bpin(?:ned|s|ning)?\b|\bunpin\w*|No eviction candidates|never (?:be )?evicted"
    r"|cannot (?:be )?evict\w*|pinned_count",
    "ranks": r"\bDP\b ?(?:rank|mode|=|\d|group|engine|attention)?|data[- _]parallel\w*|\breplicas?\b|\bpods?\b"
    r"|\binstances\b",
    "unequal": r"(?:un|im)-?balanc\w*|uneven\w*|unequal\w*|skew\w*|on (?:a |only )?(?:a )?few"
    r"|one (?:DP )?(?:rank|replica|instance|engine)"
    r"|(?:other|some) (?:DP )?(?:ranks?|replicas?|instances?|engines?)"
    + _NEAR
    + r"(?:idle|empty|free|full|nothing)|负载不均|不均衡",
    "process_gone": rf"(?:Engine ?Core|engine(?:'s)?|child|core|scheduler"
    rf"|worker) ?(?:sub)?(?:process)?{_NEAR}\b(?:dies|died|dead|crash\w*"
    r"|exit(?:s|ed)|kill(?:s|ed)|terminat\w*|gone|defunct|zombie)\b|EngineDeadError|dies silently"
    r"|进程[^。\n]{0,8}(?:退出|崩溃|挂掉)",
    "answers_health": rf"health\w*{_NEAR}(?:200|\bok\b|pass\w*|healthy|answer\w*|respond\w*)|liveness"
    rf"|says (?:that )?(?:it|the engine) is healthy"
    r"|reports healthy|is healthy|GET /(?:version|health)|goes on answering|still (?:answers|responds|returns"
    r"|alive)|stay alive|remains? alive",
    "slots": r"max[_-]num[_-]seqs|max[_-]running[_-]requests|req_to_token_pool|\bslots?\b"
    + _NEAR
    + r"(?:leak|exhaust|run out|never|full|held)"
    r"|max_loras|lora slots?|deferred (?:together )?|skipped_waiting|as many as max"
    rf"|(?:adapters?|loras?)\b{_NEAR}(?:\bfull\b|fill\w*|permanent\w*|no free)"
    rf"|(?:fill\w*|permanent\w*|no free){_NEAR}(?:adapter|lora)",
    "pool_free": rf"(?:KV[- ]?cache|cache|pool|memory){_NEAR}(?:mostly |nearly |almost |largely )(?:free|empty|unused)"
    r"|KV cache usage\W{1,3}(?:is |falls to |at |only )?0(?:\.0)? ?%|plenty of (?:free )?(?:KV|blocks|memory)",
    "pool_full": rf"(?:KV[- ]?cache|cache|usage|pool|blocks){_NEAR}(?:\b100(?:\.0)? ?%|\b9\d(?:\.\d)? ?%"
    rf"|\bfull\b|exhaust\w*|fills? up|打满|满了|100%)"
    r"|\b(?:close to|near(?:ly)?|at|hit\w*|reach\w*) (?:100|9\d)(?:\.\d)? ?% (?:of (?:the )?)?(?:KV |GPU ){0,2}cache"
    r"|\bfull\b[^.\n]{0,20}KV|no (?:more )?free (?:KV )?blocks|KV[- ]cache pressure|not enough (?:KV|blocks)",
    "head_blocks": r"head[- ]of[- ]line|\bHOL\b|queue head|head of the (?:waiting )?queue|block(?:s|ed"
    r"|ing)? (?:all|every|later|other|everyone)"
    r"|every (?:later|other) request|those behind|starv\w*|front of the queue",
    "loads_done": r"finished_recving|loads? (?:done|finish\w*|complete)|both loads finish|loaded blocks"
    r"|promoted|already (?:loaded|fetched)|parked",
    "wake_lost": rf"(?:completion|notification|event|signal|callback|message|wake-?up){_NEAR}(?:lost|dropped"
    rf"|missed|swallowed|ignored)"
    r"|lost wake-?up|engine sleeps|goes? to sleep|never woken",
    "idle_engine": r"\bidle\b"
    + _NEAR
    + r"(?:poll\w*|get_finished|steps?|sleep\w*)|(?:poll\w*|get_finished)"
    + _NEAR
    + r"\bidle\b",
    "front_end": r"tokenizer[_ -]worker\w*|API ?servers?\b|front-?\s?end|\brouter\b|\bgateway\b|TCP ESTABLISHED"
    r"|HTTP response|tokenizer ?manager",
    "unanswered": r"never (?:got|get|receiv\w*|return\w*) (?:an? |any )?(?:HTTP )?(?:response|answer|reply"
    r"|result)|no (?:HTTP )?response"
    r"|requests? (?:is|are) never (?:answered|returned)|connections? (?:stay|remain)|收不到(?:响应|回复)",
    "endless_output": r"(?:keeps?|never stops?|endless\w*|infinite\w*|won't stop|does(?:n't"
    r"| not) stop) (?:on )?(?:reason|generat|output|repeat"
    r"|think|talk|print)\w*|until (?:the )?(?:token cap|max[_ -]?(?:new[_ -])?tokens|max_model_len|the limit)"
    r"|repeats? itself|(?:infinite|endless|never-ending) (?:response|generation|output|reasoning|answer)"
    r"|(?:无限|一直|不停)(?:地)?(?:输出|生成|重复|思考)",
    "memory_taken": rf"(?:takes?|took|uses?|used|eats?|eaten up|occup\w*|consum\w*|reserv\w*"
    rf"|alloc\w*){_NEAR}(?:\d+ ?(?:GB|GiB|G)\b|by the KV|all (?:of )?(?:the )?"
    r"(?:GPU )?(?:memory|VRAM)|(?:most|much|chunk|bulk|share|fraction|part) of (?:the |your |its |my )?"
    r"(?:GPU |device )?(?:memory|VRAM))"
    r"|(?:requires?|needs?|costs?) (?:around |about |up to |only )?\d+ ?(?:GB|GiB|G)\b[^.\n]{0,12}"
    r"(?:VRAM|GPU memory|显存)|(?:uses?|used|takes?|took) (?:up )?(?:a lot|too much|so much) of (?:the )?"
    r"(?:GPU |device )?(?:V?RAM|memory)"
    r"|(?:limit|control|restrict|measure|cap) (?:the |max |maximum |total |actual ){0,4}(?:GPU |device )?memory"
    r"|(?:as much|too much|allocat\w+ all)(?: \w+){0,4}? (?:memory|RAM|VRAM|storage)\b|(?:memory|RAM) usage is too high"
    r"|\b(?:GPU|VRAM)(?: memory)? usage (?:is|of) (?:about |around )?\d+ ?(?:GB|GiB|G)\b"
    r"|gpu[-_ ]memory[-_ ]utili[sz]ation\W{0,3} does(?:n't| not) (?:work|pick)"
    r"|占用[^。\n]{0,12}(?:显存|内存)|显存[^。\n]{0,10}占",
    "slow": r"\bslow(?:s|ly|er|down)?\b|latency|\bTTFT\b|throughput"
    + _NEAR
    + r"(?:drop|fall|fell|low|collaps|degrad|decreas)\w*|degrad\w+|\bkill(?:s|ed)? (?:the )?throughput|变慢|很慢|特别慢"
    r"|(?:TPOT|TTFT|时延|延迟|耗时)[^。\n]{0,12}(?:激增|增加|上升|飙升|变长|暴涨)|吞吐[^。\n]{0,8}(?:下降|降低)"
    r"|goes on after",
    "tier_misses": rf"(?:lmcache|external|offload\w*|CPU cache|remote|store|hicache|ucm|kvbm|mooncake"
    rf"|L[23]){_NEAR}(?:\b0 ?%|\bno|never|zero|0) {_NEAR}(?:hits?|retriev\w*|reus\w*)"
    r"|none of (?:the )?(?:\w+ ){1,4}(?:is|are|was|were|gets?) hit\b"
    r"|stor(?:es|ed|ing)" + _NEAR + r"(?:never|not|no) (?:hit|retriev|read|reus|found)\w*",
    "tier_hits_few": rf"(?:lmcache|hicache|kvbm|ucm|external cache|{_TIER})[^.\n]{{0,40}}?"
    r"(?:\bcache miss|\bhit rate[^.\n]{0,20}? low\b)"
    rf"|hit rate[^.\n]{{0,40}}?{_TIER}[^.\n]{{0,20}}? low\b",
    "tier_full": r"(?:staging|pinned|CPU|host|allocator|lmcache|local cpu|tier|\bRAM)\b[^.。\n]{0,130}?"
    r"(?:\bfull\b(?! (?:logs?|output|trace\w*|stack|error|command|list|config\w*|attention))|exhaust\w*|out of memory"
    r"|no (?:free )?(?:memory|space)|under (?:memory )?pressure)"
    r"|compet\w+ (?:for )?(?:the )?(?:host|CPU) memory|\bcannot store (?:\d{1,9} )?blocks"
    r"|wait\w* for (?:memory|space|buffer)|busy[- ]loop" + _NEAR + r"alloc\w*",
    "double_free": r"double[- ]?free\w*|freed twice|free(?:s|d)? (?:it |them |the same \w+ )?(?:twice|again)"
    r"|ref_?(?:cnt|count)\w*" + _NEAR + r"(?:negative|< ?0|-1|underflow)",
    "reused_early": rf"use[- ]after[- ]free|overwrit\w+|(?:reus|reallocat|reassign)\w*{_NEAR}(?:while|before"
    rf"|still)|\bstale (?:KV|blocks?|data|cache)|write[- ]after[- ]free",
    "wrong_output": r"\bgarbage\b|garbled|gibberish|corrupt\w*|wrong (?:answer|output|result|token)\w*"
    r"|incorrect (?:output|answer|result)\w*|nonsense|mix(?:es|ed)? up|乱码",
    "read_late": r"may have expired|after (?:the |its |their )?(?:lease|blocks?)[^.\n]{0,40}(?:expire|freed"
    r"|released|reused)|invalid KV blocks",
    "metric_wrong": rf"(?:metrics?|gauges?|counters?|usage|cache size|size log|hit rate|statistics|log"
    rf"|histogram|占用率){_NEAR}(?:\bwrong\b|incorrect|negative|always (?:0|zero)"
    r"|stays? (?:at )?(?:0|zero)|not (?:updated|reported|exposed|reset|exported)|double[- ]count|mislead"
    r"|inaccurate|NaN|> ?100|负数|不准|错误|异常|over-?count\w*|not wired)"
    rf"|\b(?:wrong|incorrect|inaccurate)\b{_NEAR}(?:metric|gauge|counter|_perc\b|statistic)"
    r"|\b(?:over|under|double|mis)-?count(?:s|ed|ing)?\b|\bcounts? re-?comput\w+",
    "out_of_memory": r"out[- ]of[- ]memory|\bOOM\w*\b|OutOfMemory\w*|显存(?:不足|溢出)|爆显存",
    "graphs": r"\b(?:CUDA|NPU|HIP|ACL) ?graphs?\b|graph capture|captur\w+ (?:the )?(?:CUDA )?graphs?|cudagraphs?",
    "start_fails": r"(?:fail\w*|crash\w*|unable|cannot|can't|refus\w*|error\w*|won't|not able)"
    + _NEAR
    + r"(?:(?:to )?(?:start|launch|load|boot|init\w*|deploy|run\b)|(?:at|on|during) (?:start-?up|launch"
    r"|initiali[sz]ation))|(?:at|on|during) (?:start-?up|launch|initiali[sz]ation)"
    + _NEAR
    + r"(?:fail|crash|error|abort|exception|out of memory|OOM)|deployment failed|启动(?:失败|报错|不了)|无法启动",
    "no_room_for_pool": r"not enough (?:GPU )?(?:memory|room|space) (?:for|to) "
    + _NEAR
    + r"(?:KV|cache|blocks|pool)|KV cache"
    + _NEAR
    + r"(?:too small|not enough|insufficient|to small|larger than the available)"
    r"|increase --mem-fraction-static"
    r"|(?:try|please|consider|should|must|need to|had to|have to|by) increas\w+ `?gpu_memory_utilization"
    r"|0 (?:GPU )?blocks",
    "other_process": r"(?:other|another|second|two|multiple|several) (?:vllm |sglang )?(?:process(?:es)?"
    r"|engines?|models?|instances?|servers?|jobs?) "
    + _NEAR
    + r"(?:same|one|a single|shared?) (?:GPU|device|card|machine)"
    r"|(?:shared?|sharing) (?:the |a |one )?(?:GPU|device|card)|(?:same|one) GPU\b|co-?locat\w*"
    r"|already (?:in use|used|occupied) by"
    r"|\b(?:two|multiple|several|second) (?:(?:vllm|llm|sglang|model) )?(?:instances|engines|servers|containers)\b",
    "memory_left_behind": rf"memory (?:is|was) not (?:freed|released){_NEAR}(?:launch|start|engine|utili)",
    "unlike_devices": r"(?:different|unlike|mixed|heterogeneous|unequal|mismatched) (?:GPUs?|devices?|cards?"
    r"|VRAM|memory sizes?)|smallest (?:GPU|worker|rank|device|card|stage)|pipeline (?:stage|parallel)\w*"
    + _NEAR
    + r"(?:uneven|smallest|min|bottleneck)",
    "advice_wrong": r"contradict\w*|(?:suggest|recommend|advice|advis|hint|estimat)\w*"
    + _NEAR
    + r"(?:wrong|opposite|negative|too (?:large|high|low|optimistic)|overoptimistic|still (?:fail|OOM)"
    r"|not? enough|does(?:n't| not) work)|overoptimistic",
    "large_block": r"block[_ ]?sizes?"
    + _NEAR
    + r"(?:\b[2-9]\d{2}\b|\b[1-9]\d{3}\b|large|huge|inflat|blown)|< ?block_size|shorter than (?:one|a) block",
    "session": r"\bsessions?\b|streaming (?:session|input)s?",
    "fenced": r"deferred[_ ]free\w*|\bfence[sd]?\b|free\w*" + _NEAR + r"until (?:the |a )?step",
    "drains": r"(?:after|each|every) "
    + _NEAR
    + r"\b(?:idle|drain\w*|all requests (?:finish|complete|end)\w*)|baseline (?:usage )?(?:grows|rises"
    r"|increases)|even (?:when|with|after) (?:idle|no (?:requests?|load|traffic))"
    r"|空闲[^。\n]{0,20}(?:占用|不为|使用率)",
    "audit": r"(?:memory|pool) leak detected|check_memory|available_size|pool (?:audit|check)",
    "skipped_free": rf"skip\w*{_NEAR}(?:clean-?up|dealloc\w*|release)\b|"
    r"(?:skip\w*|forg[eo]t\w*|miss(?:es|ed|ing)|without|lacks?|no|never calls?) (?:the |a "
    r"|to )?(?:call(?:ing)? )?(?:free|release|dec_lock_ref|cache_finished_req|unref\w*)\w*",
    "rank_stops": r"(?:one|a|single|another) (?:DP )?rank"
    + _NEAR
    + r"(?:hang|stuck|stop|die|exit|wait|fall)\w*|(?:rest|other ranks|others) (?:wait|go on|continue|block)\w*"
    r"|collective" + _NEAR + r"(?:hang|mismatch|time)",
    "crashes": r"\bcrash(?:es|ed|ing)?\b|encounter(?:s|ed)? (?:an? )?(?:fatal )?(?:issue|error|exception)|崩溃|报错",
    "watchdog": r"\bwatchdog (?:timeout|time-out|expired|fired)",
    "usage_low": rf"usage{_NEAR}(?:small|low)\b|\blow{_NEAR}KV[- ]?cache usage",
    "fails": r"\bfail(?:s|ed|ing|ures?)?\b|\berrors?\b|\bissues?\b|\bproblems?\b|失败|错误",
    "asks_for_help": r"how (?:to|do (?:I|we)|can (?:I|we)|should (?:I|we)) (?:solve|fix|avoid|resolve|prevent|handle)\b"
    r"|怎么解决|如何解决|解决办法|什么原因|什么bug",
    "host_memory_grows": rf"{_RAM}{_NEAR}{_GROWS}|(?:leak|unbounded|grow|increas|overflow)\w*{_NEAR}{_RAM}",
    "host_process_killed": r"\bOOM-?Killed\b|\boom[- ]killer|killed by the (?:OS|kernel|operating system)"
    r"|\b(?:k8s|kubernetes|kubelet)\b[^.\n]{0,60}\bOOM\b|\b(?:router|gateway|API ?server)\b[^.\n]{0,80}\bOOM\b",
    "frees_nothing": r"\bcascad\w*|preempt\w*[^.\n]{0,120}?(?:frees? nothing|without freeing|returned to (?:the )?pool)"
    r"|unchanged free[- ]block",
    "asks_about_pool": r"\bwhat (?:\w+ )?(?:decides?|determines?|defines?|is) (?:the )?(?:GPU )?KV[- ]?cache {1,2}"
    r"(?:size|usage)\b[^.\n?]{0,40}\?|relation(?:ship)? between [^.\n?]{0,60}(?:KV[- ]?cache|gpu_memory_utilization)"
    r"|(?:KV ?cache|显存)[^。\n]{0,12}(?:大小|占用)[^。\n]{0,10}(?:怎么|如何|由什么|决定)",
    "feature_request": r"\[Feature[^\]\n]{0,20}\]|The feature, motivation and pitch",
    "bug_label": r"\[Bug[^\]\n]{0,20}\]",
    "flushed": r"(?:evict|flush|push)\w*"
    + _NEAR
    + r"(?:useful|hot|other|whole|entire|all) "
    + _NEAR
    + r"(?:prefix|cache|blocks?)|cache (?:pollution|flush\w*|thrash\w*)|evicts? everything",
    "alike": r"(?:all|every) (?:running )?requests?"
    + _NEAR
    + r"(?:at once|simultaneously|at the same time|together)|lock-?step|同时",
    "question": r"\?(?:\s|$)|\bwhy\b|\bhow (?:can|do|to|many|much)\b|为什么|如何|怎么|请问|是否正常",
    "usage_falls": r"usage"
    + _NEAR
    + r"from \d{2,3}(?:\.\d)? ?%"
    + _NEAR
    + r"to \d(?:\.\d)? ?%|使用率[^。\n]{0,10}(?:掉到|降到|跌到) ?0",
}


def _bounded(phrase: str) -> str:
    """Let a phrase read no more than 40 letters of a word and 9 digits of a number, and give none of them back.

    Otherwise a line that is one long word costs its length from each of its places, times that of what follows.
    """
    return re.sub(r"\\(w|d)([*+])", _bounded_run, phrase)


def _bounded_run(match: re.Match[str]) -> str:
    return rf"\{match[1]}{{{0 if match[2] == '*' else 1},{40 if match[1] == 'w' else 9}}}+"


@cache
def phrase_expressions() -> dict[str, re.Pattern[str]]:
    """Return the compiled phrases by concept. They take 30 ms to compile, so only a report in prose compiles them.

    ASCII: English words stand in Chinese sentences without a space, and only then is that a word boundary.
    """
    return {name: re.compile(_bounded(text), re.IGNORECASE | re.ASCII) for name, text in PHRASES.items()}


_DENIED: Final = re.compile(
    r"(?:\b(?:no|not|without|isn't|aren't|wasn't|don't|doesn't|did not|does not|neither"
    r"|nor)\b(?:\W+\w+){0,2}\W{1,3}|没有|不是|并非|无)$",
    re.IGNORECASE,
)
_DENIES_ITSELF: Final = (
    "stuck",
    "waits_unserved",
    "not_freed",
    "unanswered",
    "zero_tokens",
    "prefix_misses",
    "skipped_free",
    "tier_misses",
    "memory_left_behind",
    "transfer_lost",
)
"""Concepts some of whose phrases contain the denial."""
_HAS_DENIAL: Final = re.compile(
    r"\b(?:not?|never|nothing|nobody|none|without|zero|unable|cannot)\b|n't\b|不|没有|未|无", re.IGNORECASE
)
_DENIED_RIGHT_BEFORE: Final = re.compile(
    r"\b(?:no|not|never|without|isn't|aren't|wasn't|don't|doesn't|didn't)(?: (?:an?|any|the))?"
    r"(?: (?!(?:and|but|or|only|just|to|it)\b)\w+)? $",
    re.IGNORECASE,
)
"""A denial of the next word, or of the one after an adjective: "this is not a resource leak"."""
_SUPPOSABLE: Final = ("out_of_memory", "no_room_for_pool")
"""Concepts that an explanation names as what may happen."""
_SUPPOSED: Final = re.compile(r"\b(?:if (?:you|your|this|it)|might|may|could|would|when you)\b[^.!?]*$", re.IGNORECASE)
_UNLIKELY: Final = re.compile(r"\W{1,9}(?:less|more|un) ?likely", re.IGNORECASE)
_NEGATED: Final = re.compile(r"\b(?:not|no|without)\b|n't\b", re.IGNORECASE)
_CODE_LINE: Final = re.compile(
    r"^\s*(?:File \"|raise |return |import |from \w+ import|def |class |at \w|\w+\(|\^+|--[a-z]"
    r"|(?:export )?[A-Z][A-Z0-9_]{3,60}=)"
)


class StatedPhrase(NamedTuple):
    """A concept, the line from 1 on that names it, and the words."""

    line: int
    concept: str
    quote: str


def stated_phrases(lines: Iterable[PastedLine]) -> list[StatedPhrase]:
    """Each concept that the prose among the lines names, where it does so first."""
    found: dict[str, StatedPhrase] = {}
    for starts, text in _paragraphs(lines):
        for concept, expression in phrase_expressions().items():
            if concept in found:
                continue
            for match in expression.finditer(text):
                denied = (_is_denied_at_once if concept in _DENIES_ITSELF else _is_denied)(text, match)
                if not denied and not (concept in _SUPPOSABLE and _is_supposed(text, match)):
                    line = next(number for offset, number in reversed(starts) if offset <= match.start())
                    found[concept] = StatedPhrase(line, concept, " ".join(match[0].split())[:MOST_QUOTED_WORDS])
                    break
    return list(found.values())


def _is_denied(text: str, match: re.Match[str]) -> bool:
    before = text[max(0, match.start() - 40) : match.start()]
    return _DENIED.search(before) is not None or _NEGATED.search(match[0]) is not None


def _is_denied_at_once(text: str, match: re.Match[str]) -> bool:
    """Whether the words right before a phrase without a denial of its own deny it."""
    before = text[max(0, match.start() - 40) : match.start()]
    return _HAS_DENIAL.search(match[0]) is None and _DENIED_RIGHT_BEFORE.search(before) is not None


def _is_supposed(text: str, match: re.Match[str]) -> bool:
    """Whether the sentence names what may happen, and not what did."""
    before = text[max(0, match.start() - 120) : match.start()]
    return _SUPPOSED.search(before) is not None or _UNLIKELY.match(text, match.end()) is not None


def _paragraphs(lines: Iterable[PastedLine]) -> Iterator[tuple[list[tuple[int, int]], str]]:
    """Yield runs of lines of prose as one text each, with where in it each line begins."""
    starts: list[tuple[int, int]] = []
    text, last, total = "", 0, 0
    for line in lines:
        if line.is_record or _CODE_LINE.match(line.text):
            continue
        total += len(line.text)
        if total > MOST_PROSE:
            break
        if text and (line.number != last + 1 or len(text) > 4_000):
            yield starts, text
            starts, text = [], ""
        starts.append((len(text), line.number))
        text += line.text.strip() + " "
        last = line.number
    if text:
        yield starts, text
